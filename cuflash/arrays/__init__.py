"""What arrays are: dtypes, strides, memory, DLPack, fp8."""
