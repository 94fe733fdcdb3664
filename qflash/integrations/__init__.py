"""qflash inside other projects: one file or pair of files for each, on the public API alone."""
