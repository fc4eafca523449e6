"""As much of Megatron Bridge 0.6.2's interface as examples/bridge_install.py uses."""
