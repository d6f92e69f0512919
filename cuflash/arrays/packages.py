"""Packages that CUDA takes, for messages: what pip has on its index, whether cuflash itself is there or not."""

BINDINGS, NVRTC = "cuda-bindings", "nvidia-cuda-nvrtc"  # to compile, with or without a device: the extra `compile`
# To run kernels: the extras `cuda13` and `cuda12`.
CUDA13 = '"cupy-cuda13x[ctk]>=14" "cuda-bindings>=13,<14"'
CUDA12 = '"cupy-cuda12x[ctk]>=14" "cuda-bindings>=12.9,<13"'
INSTALL_CUPY = f"pip install {CUDA13} (or for a driver of CUDA 12 {CUDA12})"
