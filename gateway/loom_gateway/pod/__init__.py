"""The processes in each pod of a job that `loom.KubernetesJob` deploys: a worker, and in one pod the gateway.

`python -m loom_gateway.pod FOLDER` is the pod's **keeper**. It keeps a worker running, finds the other pods by the
DNS name of their headless service, and agrees with their keepers on the gateway's pod. The other pods forward the
gateway's port to that pod, so a client may connect to any. `loom_gateway.pod.loom_pod.LoomPod` starts the keeper
and talks to it.
"""
