"""Benchmarks: presets, the peers qflash is compared with, rows, plots and the README's tables. Runs from a checkout."""
