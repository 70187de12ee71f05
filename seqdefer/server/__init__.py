"""`seqdefer serve DIR`: a fitted pair behind an OpenAI-compatible API.

    metrics         counters, histograms and gauges for Prometheus
    http            limits and errors
    keys, usage     API keys in a file; what each may use in a day, and has used
    logs, settings  logs for people or as JSON; settings from options, environment and file
    gateway         what every request passes: host, key, size, time, counting
    breaker         leaves an expert alone for a while after several failures in a row
    expert_calls    calls of the expert, with a time limit; remote ones do not block others
    fallback        the predictor takes over when the expert fails or answers nonsense
    tickets         a submitted request, its rows and its events, between event loop and models
    batches         requests that are written together, and join and leave between two turns
    tracing         spans of requests and of passes, with the extra 'tracing'
    scheduler       the thread that owns the models, and the queue before it
    drift           tests of what is served against the calibration
    protocol        requests as JSON
    shapes, openapi the shapes of responses, and the errors of routes: /openapi.json
    responses       what the models wrote, as JSON
    transcriptions  uploads of sound, as forms, and their responses
    request         one request from its body to its response
    app, page/      the routes; the files of the page to try it
    connections     deadlines of connections, and which gives way when there are too many
    serve           sockets, loading, shutdown

`app`, `openapi`, `protocol`, `request`, `responses`, `shapes` and `transcriptions` import FastAPI and are loaded when a
server starts: it comes with the extra 'server'.
"""
