"""Programs that build the site, its reference, its pictures and its notebooks."""
