"""The same two jobs with fedbe and with other simulators of federated learning."""
