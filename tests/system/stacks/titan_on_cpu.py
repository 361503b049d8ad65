"""``python titan_on_cpu.py OPTIONS`` runs ``python -m torchtitan.train OPTIONS`` on a machine without a GPU.

torchtitan 0.3.0 asks torch's device for names and memory that a CPU does not have, attends with a kernel that has
no backward pass on CPUs, and calls a function of later versions of torch. Stand-ins take these places. Its Trainer,
its loop, and everything else are its own.
"""

import os
import runpy
from types import SimpleNamespace

import torch
import torch._utils
from torch.nn.attention.flex_attention import AuxOutput
from torch.nn.functional import scaled_dot_product_attention

torch._utils._get_available_device_type = lambda: "cpu"
torch.cpu.device_count = lambda: 1
torch.cpu.current_device = lambda: 0
torch.cpu.get_device_name = lambda *_: "cpu"
torch.cpu.get_device_properties = lambda *_: SimpleNamespace(total_memory=os.sysconf("SC_PAGE_SIZE") << 22)
torch.cpu.memory_stats = lambda *_: {}
torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda: None
torch.distributed.set_timeout = lambda *_: None

from torchtitan.models.common.attention import FlexAttention  # noqa: E402


def attend(query, key, value, *, scale, enable_gqa, **_):
    attended = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=enable_gqa)
    return attended, AuxOutput(lse=None)


FlexAttention._compiled_flex_attn = staticmethod(attend)
runpy.run_module("torchtitan.train", run_name="__main__")
