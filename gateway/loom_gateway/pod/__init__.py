"""What runs in each pod of a job that `loom.KubernetesJob` deploys: a worker, and in one of the pods the gateway.

`python -m loom_gateway.pod FOLDER` is the **keeper**. It keeps a worker running, finds the other pods by the DNS of
their headless service, and sees with them which of them has the gateway; the others forward the gateway's port to
it, so that whoever asks may land on any. `loom_gateway.pod.loom_pod.LoomPod` starts the keeper and speaks to it.

- `loom_gateway.pod.settings` is what a keeper is told.
- `loom_gateway.pod.election` decides which pod has the gateway.
- `loom_gateway.pod.process` keeps a process running.
- `loom_gateway.pod.forwarding` passes connections on.
- `loom_gateway.pod.peers` asks other keepers.
- `loom_gateway.pod.supervisor` does what these decide.
- `loom_gateway.pod.app` is how it is asked and told.
"""
