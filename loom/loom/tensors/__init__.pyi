"""Every public name of `loom.tensors` and its module."""

from loom.tensors.grad_modes import enable_grad as enable_grad
from loom.tensors.grad_modes import no_grad as no_grad
from loom.tensors.layouts import DType as DType
from loom.tensors.layouts import bfloat16 as bfloat16
from loom.tensors.layouts import complex64 as complex64
from loom.tensors.layouts import complex128 as complex128
from loom.tensors.layouts import float16 as float16
from loom.tensors.layouts import float32 as float32
from loom.tensors.layouts import float64 as float64
from loom.tensors.layouts import int8 as int8
from loom.tensors.layouts import int16 as int16
from loom.tensors.layouts import int32 as int32
from loom.tensors.layouts import int64 as int64
from loom.tensors.layouts import uint8 as uint8
from loom.tensors.on_procs import on as on
from loom.tensors.placements import Replicate as Replicate
from loom.tensors.placements import Shard as Shard
from loom.tensors.tensor import Tensor as Tensor
from loom.tensors.tensors import Tensors as Tensors
from loom.tensors.watching import Watches as Watches
