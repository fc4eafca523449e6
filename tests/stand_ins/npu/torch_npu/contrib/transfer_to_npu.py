"""What importing torch_npu's transfer_to_npu changes, as its documentation describes it: `is_cuda` answers for the
NPU, torch.jit.script does nothing, has_triton() says no, and the backend name nccl is renamed (here to gloo)."""

import torch
import torch.distributed as dist
import torch.utils._triton

torch.Tensor.is_cuda = property(lambda self: self.device.type == "npu")
torch.jit.script = lambda function, *args, **kwargs: function
torch.utils._triton.has_triton = lambda: False

_init = dist.init_process_group


def init_process_group(backend=None, *args, **kwargs):
    return _init("gloo" if backend == "nccl" else backend, *args, **kwargs)


dist.init_process_group = init_process_group
