"""`loom.KubernetesJob`: pods that Kubetorch deploys, and connections to them."""
