"""Every public name of Loom and its module, for type checkers, and for `loom` when it looks names up."""

from loom import chaos as chaos
from loom import devices as devices
from loom import errors as errors
from loom import rl as rl
from loom import tensors as tensors
from loom import threadlet as threadlet
from loom import tracing as tracing
from loom import train as train
from loom._version import __version__ as __version__
from loom.actor import Actor as Actor
from loom.actor import Context as Context
from loom.actor import MeshFailure as MeshFailure
from loom.actor import ProcId as ProcId
from loom.actor import Uid as Uid
from loom.actor import concurrent_endpoint as concurrent_endpoint
from loom.actor import context as context
from loom.actor import current_actor_name as current_actor_name
from loom.actor import current_rank as current_rank
from loom.actor import current_size as current_size
from loom.actor import endpoint as endpoint
from loom.actor import get_meter as get_meter
from loom.actor import get_or_spawn_controller as get_or_spawn_controller
from loom.actor import returns_future as returns_future
from loom.actor import span as span
from loom.actor import this_host as this_host
from loom.actor import this_proc as this_proc
from loom.actor import traced as traced
from loom.bootstrap import BootstrapCommand as BootstrapCommand
from loom.bootstrap import default_bootstrap_cmd as default_bootstrap_cmd
from loom.errors import *  # noqa: F403
from loom.remote_traceback import show_internal_frames as show_internal_frames
from loom.shape import Extent as Extent
from loom.shape import NDSlice as NDSlice
from loom.shape import Point as Point
from loom.shape import Shape as Shape
from loom.threadlet import Threadlet as Threadlet
from loom_proxy.code_sync.folders import SyncResult as SyncResult
from loom_proxy.futures.future import FutureProxy as FutureProxy
from loom_proxy.futures.waiting_for_many import as_completed as as_completed
from loom_proxy.futures.waiting_for_many import wait as wait
from loom_proxy.job import Job as Job
from loom_proxy.kubernetes.job import KubernetesJob as KubernetesJob
from loom_proxy.local import local as local
from loom_proxy.mesh.actors import ActorMeshProxy as ActorMeshProxy
from loom_proxy.mesh.endpoints import EndpointProxy as EndpointProxy
from loom_proxy.mesh.procs import HostMeshProxy as HostMeshProxy
from loom_proxy.mesh.procs import ProcMeshProxy as ProcMeshProxy
from loom_proxy.mesh.sending import Accumulator as Accumulator
from loom_proxy.mesh.sending import as_endpoint as as_endpoint
from loom_proxy.mesh.sending import send as send
from loom_proxy.mesh.values import ValueMeshProxy as ValueMeshProxy
from loom_proxy.notebook.cells import load_ipython_extension as load_ipython_extension
from loom_proxy.port import Port as Port
from loom_proxy.port_receiver import Channel as Channel
from loom_proxy.port_receiver import PortReceiver as PortReceiver
from loom_proxy.remote.classes import cls as cls
from loom_proxy.remote.classes import fn as fn
from loom_proxy.remote.objects import RemoteFunction as RemoteFunction
from loom_proxy.remote.objects import RemoteObject as RemoteObject
from loom_proxy.runs import RunHandle as RunHandle
from loom_proxy.session.events import unhandled_fault_hook as unhandled_fault_hook
from loom_proxy.session.open import connect as connect
from loom_proxy.slurm.job import SlurmJob as SlurmJob
from loom_proxy.weaver.client import alerts as alerts
from loom_proxy.weaver.client import runs as runs
from loom_proxy.weaver.client import this_weaver as this_weaver

# Monarch's names, for the proxies that a program on the laptop holds.
ActorMesh = ActorMeshProxy
Endpoint = EndpointProxy
Future = FutureProxy
HostMesh = HostMeshProxy
ProcMesh = ProcMeshProxy
ValueMesh = ValueMeshProxy
