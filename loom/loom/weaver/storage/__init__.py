"""What the weaver keeps in its folder, so that it goes on after it was killed."""
