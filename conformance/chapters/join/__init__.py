"""Chapter join: Join: uneven inputs."""
