"""Alias: this module moved to `loom_gateway.pod.loom_pod`, which has `LoomPod` for Kubetorch."""

from loom_gateway.pod.loom_pod import LoomPod

__all__ = ["LoomPod"]
