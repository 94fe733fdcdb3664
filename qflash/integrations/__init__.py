"""qflash inside other projects: one file, or a few, for each, on the public API alone."""
