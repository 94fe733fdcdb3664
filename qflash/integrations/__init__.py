"""Integrations of qflash into other projects: one file or a few per project, on the public API alone."""
