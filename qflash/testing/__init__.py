"""What tests and benchmarks share: one case list, one comparison, one timer. Never imported by `import qflash`."""
