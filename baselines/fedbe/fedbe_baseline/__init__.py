"""FedBE: making Bayesian model ensemble applicable to federated learning, as a Flower app."""
