"""What `tools/check replicas` tries its claims with: the command on a Ray of its own, and clients."""
