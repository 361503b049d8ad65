"""What a kubelet does: runs a pod's containers with what their manifest says of files, rights, memory and probes.

What is enforced: volumes and their limits, a read-only root file system, user and group ids, capabilities, limits
of memory and of storage, the three probes with their periods and thresholds, ``preStop`` and the grace period. What
is not: CPU, seccomp, and what a runtime hides of ``/proc``, ``/sys`` and ``/dev``.
"""
