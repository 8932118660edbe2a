"""Which part of the model a device gets: by depth, by width, or by mask."""
