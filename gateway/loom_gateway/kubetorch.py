"""Alias: `LoomPod` for Kubetorch is in `loom_gateway.pod.loom_pod`, which is where this module moved."""

from loom_gateway.pod.loom_pod import LoomPod

__all__ = ["LoomPod"]
