"""A stand-in for torch_npu on a machine without an NPU: the names that the plugin may meet, and no device."""

import types

import torch

torch.utils.rename_privateuse1_backend("npu")  # so that torch.device("npu") exists
torch.npu = types.SimpleNamespace(is_available=lambda: False, current_stream=lambda: None)
