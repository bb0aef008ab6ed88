"""Device meshes and the topologies that programs are compiled for."""
