"""`seqdefer serve DIR`: a fitted pair behind the API that clients of OpenAI already speak.

    faults, limits    what can go wrong, as a status and an error body; how much one request may ask for
    metrics           counters in Prometheus' text format
    guarding          an expert that may fail: the predictor then finishes
    plans             who decides, row by row, and what is then written
    cohorts           requests that are written together, in one batch
    turns             cohorts whose expert is elsewhere: others have the models while they wait
    scheduler         the one thread that owns the models, and the queue before it
    protocol, answers requests as JSON, and what is said to them
    schemas           the answers' shapes, for the description of itself that the server gives
    describing        which route answers what
    gate, connections what every request passes first: key, size, time, counting; how long a connection may take
    working           one request at work, to its end or to that of its client's patience
    pages, page/      the page to try it, and the files it is made of
    app, running      the routes; sockets and signals

What needs FastAPI or uvicorn at import (app, answers, connections, describing, pages, protocol, schemas, working) is
loaded when a server starts: the extra 'server' has it.
"""
