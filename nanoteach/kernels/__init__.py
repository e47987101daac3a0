"""Stage 8. Triton kernels, each in a file with its story."""
