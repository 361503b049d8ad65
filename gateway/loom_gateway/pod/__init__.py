"""The processes in each pod of a job that `loom.KubernetesJob` deploys.

`python -m loom_gateway.pod FOLDER` is the pod's **keeper**. It keeps a worker running and, in each pod of the job's
first mesh, a gateway and a session host, so that a client may connect to any of them. It finds the other pods by
the DNS name of their headless service, and agrees with their keepers on the pod that has the weaver.
`loom_gateway.pod.loom_pod.LoomPod` starts the keeper and talks to it.
"""
