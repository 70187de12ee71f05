"""`seqdefer serve DIR`: a fitted pair behind the API that clients of OpenAI already speak.

    faults, limits    what can go wrong, as a status and an error body; how much one request may ask for
    metrics           counters in Prometheus' text format
    guarding          an expert that may fail: the predictor then finishes
    cohorts           requests that are written together, one `engine.interleave` for all
    scheduler         the one thread that owns the models, and the queue before it
    protocol          requests and answers as JSON
    gate              what every request passes first: key, size, time, counting
    app, running      the routes; sockets and signals

Only `protocol` and `app` need more than seqdefer itself at import: the extra 'server' has it.
"""
