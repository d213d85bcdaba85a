"""What every wing stands on: timing, devices, records, telemetry, logging and reports. It knows no wing."""
