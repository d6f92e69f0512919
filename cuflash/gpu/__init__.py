"""The GPU: compiling, launching, timing and tuning plans."""
