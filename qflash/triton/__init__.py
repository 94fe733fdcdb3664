"""Kernels in Triton, one file each. Importing one needs the package triton; importing qflash does not."""
