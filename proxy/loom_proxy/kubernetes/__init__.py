"""`loom.KubernetesJob`: pods that Kubetorch deploys, and the way to them."""
