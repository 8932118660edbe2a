"""The pages of the site; `tools` has the programs that make some of them."""
