"""A cluster on one machine, with nothing faked that can run. Try ``python -m tests.support.cluster``.

A pod is a set of namespaces of the kernel with an address of its own. dnsmasq answers for Services and pods,
nftables does what kube-proxy does, nginx has Kubetorch's routes, and Kubetorch's own client on the "laptop" deploys
to Kubetorch's own server in the pods, code by rsync. Test tools stand in for what cannot be had here: Kubetorch's
controller (`controller`), the API of Kubernetes (`kubernetes_api`, `forwarding`), the kubelet (`kubelet`), the
network plugin (`policies`), the data store's front (`data_store`) and, in pods, uv (`uv`). The laptop has the
machine's kubectl where a test asks for it and it is new enough, and else one that stands in for it (`kubectl`).
Images are not pulled: pods share this machine's files, read-only where Python and this checkout are.

What Kubetorch 0.5 does that matters to who runs something in its pods:

- Its nginx sends ``/{namespace}/{service}:{port}/{path}`` to that name and port. A Service has one port, 80,
  which leads to the pod server's 32300; other ports of pods are reached by the headless Service's name,
  ``{service}-headless``, which lands on any ready pod. It exists only if the compute is distributed.
- Outside the cluster the client calls ``http://localhost:PORT``, with the port of ``KT_API_URL`` but not its
  host: it works through a port-forward, which it starts itself where ``KT_API_URL`` is not set.
- The pod server is the pod's first process, for bash gives way to it, and reaps no orphans: they stay as zombies.
  Its working folder, the image's or the compute's, is where synced code is, and ``.kt``.
- ``RUN`` lines of an image run in the pod when it starts, and again at a redeploy where they differ. One that
  fails is only logged. So is a class that cannot be loaded: the pod is ready all the same, and calls say why.
- With ``distribution_type="local"`` the class lives in one child process of the server, made as the pod starts.
  Coroutine methods share their loop with a poll that blocks it for 10 ms at a time; others run in up to 10
  threads. A call lands on any pod. If the child dies nothing replaces it, and calls to it never end.
- A redeploy whose pod template is the same keeps the pods, and replaces the child: it ends, and each process that
  descends from it is killed. One whose parents have ended is no descendant any more, and lives on.
- What calls answer before a class is loaded, or after the pod's helpers failed to start, is status 503: the
  client returns its body, a dict with ``detail``, as if it were the result.
"""

from tests.support.cluster.cluster import OneMachineCluster, PodInfo
from tests.support.cluster.network import missing

__all__ = ["OneMachineCluster", "PodInfo", "missing"]
