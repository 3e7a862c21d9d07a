"""What a model does and what it costs: routing telemetry and turnover, FLOPs and memory."""
