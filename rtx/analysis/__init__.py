"""What a model does and what it costs: routing telemetry, FLOPs and memory."""
