"""The weaver's persistent state in its folder, from which a restarted weaver goes on."""
