"""Chapter failed_communication: Failed communication."""
