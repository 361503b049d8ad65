"""The shapes of meshes, computed on the laptop: labelled dimensions over strided ranks.

The arithmetic is Monarch's (``monarch._src.actor.shape``), so that a slice of a proxy selects the same ranks as the
same slice of the real mesh, and its errors have Monarch's texts. In the cluster the classes make Monarch's own.
"""

from loom.shape.extent import Extent, Point
from loom.shape.mesh_trait import MeshTrait, for_cluster
from loom.shape.ndslice import NDSlice
from loom.shape.shape import Shape

__all__ = ["Extent", "MeshTrait", "NDSlice", "Point", "Shape", "for_cluster"]
