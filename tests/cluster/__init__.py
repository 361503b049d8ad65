from tests.cluster.cluster import OneMachineCluster, PodInfo
from tests.cluster.network import missing

__all__ = ["OneMachineCluster", "PodInfo", "missing"]
