"""The relay of frames between a client and its session's driver, without unpickling."""
