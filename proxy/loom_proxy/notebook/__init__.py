"""The laptop's side of a notebook: its cells that run in the cluster, and tables of jobs and meshes."""
