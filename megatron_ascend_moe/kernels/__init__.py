"""The kernels, in two implementations with one signature each: `reference` (plain torch) and Triton."""
