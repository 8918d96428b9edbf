"""Numbers from finished runs.

    runs         read run folders, group them, average over seeds
    data         the data of a run and how it is split over the clients
    rerun        run the last round again, for the clients' models, which a run does not keep
    simplex      models sampled between three clients (paper, Figure 1b)
    calibration  confidence of right and wrong predictions (paper, Figure 1c)
    features     how well the last layer's inputs separate the classes (paper, appendix)

Nothing here draws: `fedbe.report` makes charts of these numbers.
"""
