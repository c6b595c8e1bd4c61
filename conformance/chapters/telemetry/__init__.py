"""Chapter telemetry: Telemetry and debug levels."""
