// Package pagedllm serves large language models inside your own process. It wraps a C library with
// continuous batching and a paged KV cache.
//
// [Open] creates an [Engine], which by default steps itself. [Engine.Generate] runs a request for
// one result and [Engine.GenerateAll] a request for several. [Engine.Stream] returns outputs as
// they are generated. Any number of goroutines may call them at once: their requests share each
// step. To serve many requests from one goroutine, create a [Queue]. To step the engine yourself,
// set Options.HostSteps and call [Engine.Step].
//
// # Sequences
//
// The sequence of a request with Keep stays after its end as a [Sequence]. It can be forked,
// appended to, rewound and resumed, and shares KV blocks with its forks. Requests that begin with
// the same tokens share KV blocks through the prefix cache. [Engine.Pin] keeps a prompt in the
// prefix cache. [Sequence.Export] returns the state of a sequence, and [Engine.Import] creates a
// sequence from it in another process.
//
// # Limits
//
// The KV pool takes its bytes from a memory budget, a [Budget]. Engines can share it, and
// [Budget.Resize] changes it while they run. Options set the order of requests, the treatment of
// preempted requests and the number of waiting requests. [Engine.PredictAdmission] predicts the
// admission of a request. [Engine.Metrics] returns metrics for Prometheus.
//
// # Several processes
//
// A model can be divided among processes. Each joins a group with [SharedMemoryCommunicator], which
// is Options.Communicator. Rank 0 opens the engine, and the others call [RunWorker]. A list of devices
// in Options.Device divides the model within one process, without a communicator.
//
// # KV stores
//
// A [KVStore] keeps KV blocks on a disk or on another host, so that a prefix which one engine has
// computed is a hit for others. [OpenFilesStore] and [OpenValkeyStore] load the libraries in
// connectors of the repository. The store is Options.KVStore.
//
// # Defaults
//
// The zero value of each field selects the library's default. If 0 has a meaning of its own, the
// field is a pointer: for example, Sampling.Temperature (0 is greedy, the default is 1) and
// Sampling.Seed. See [Ptr].
//
// # Errors
//
// Every error is an [*Error] with the library's message, except the error of a context that is
// done. Distinguish kinds with errors.Is(err, pagedllm.ErrCapacity). An error in a request, an
// option or a model never ends the process. If a prompt is too long, Error.PromptTokens and
// Error.MaxModelLen have the numbers. If the same call can succeed later, Error.IsTemporary is set.
// [Engine.Healthy] returns the error that has stopped the engine.
//
// # Contexts
//
// Functions that wait take a context. When it is done, they return its error. If it is done before
// the call, nothing is started. If the context of a request is done, the request is aborted, and
// its memory is free from the next step on. The deadline of a context is not used as
// Request.Deadline: a context that is done is an error, but a request that reaches its
// Request.Deadline ends with FinishDeadline and the tokens it has.
//
// # Goroutines and threads
//
// Any number of goroutines may use every object. A goroutine that waits is parked on the network
// poller of the runtime and blocks no thread. Each stream and each queue needs two file
// descriptors. The library never calls into Go, so the package has no logits hook. Only Open, Plan,
// Step, Stop, Close, RunWorker and SharedMemoryCommunicator block a thread while they run.
//
// # Closing
//
// [Engine.Close] may be called at any time, from any goroutine, more than once. It waits for calls
// in progress; calls that wait and streams end with [ErrClosed]. An engine, budget, queue or
// sequence that is unreachable is closed after the garbage collector has found it.
//
// # Building
//
// The package needs cgo, Linux, the header pagedllm.h and the library. By default it links
// -lpagedllm from the search path of the compiler or from these variables:
//
//	CGO_CFLAGS="-I$PREFIX/include" CGO_LDFLAGS="-L$PREFIX/lib -Wl,-rpath,$PREFIX/lib" go build
//
// Build tags select another way:
//
//	go build -tags pagedllm_pkgconfig   # flags of pkg-config; set PKG_CONFIG_PATH
//	go build -tags pagedllm_static      # libpagedllm.a; set CGO_CFLAGS, CGO_LDFLAGS
package pagedllm
