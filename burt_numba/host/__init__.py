"""What the public functions share on the host: arrays, checks, errors, compiling, launching, plans."""
