"""What the kernels share, running alike on the GPU and in the simulator."""
