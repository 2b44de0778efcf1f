// Package pagedllm serves large language models inside your own process: continuous batching over a paged KV cache, in a C
// library that this package wraps.
//
// [Open] makes an [Engine], which steps by itself. [Engine.Generate] runs one request to its end, [Engine.GenerateAll] one for
// several results, [Engine.Stream] gives outputs as they come, and any number of goroutines may do so at once: their requests
// share each step. Who serves many requests from one goroutine makes a [Queue]. A host that wants to decide when the engine
// computes sets Options.HostSteps and calls [Engine.Step].
//
// # Sequences
//
// What a request with Keep has made of its prompt stays, as a [Sequence], and is a value: it can be forked, appended to, cut back
// and resumed, and shares with its forks what was computed. Requests that begin with the same tokens share that, too, without
// being told: [Engine.Pin] keeps a prompt for them. [Sequence.Export] writes a sequence down, and [Engine.Import] makes it anew in
// another process.
//
// # Limits
//
// The KV pool takes its bytes from an [Arena], which engines may share and [Arena.Resize] changes while they run. Options say who
// comes first, what gives way, and how much may wait; [Engine.Admit] says beforehand what would become of a request.
// [Engine.Metrics] is for dashboards.
//
// # Defaults
//
// Every field's zero value is the library's default. The fields where 0 means something else, as Sampling.Temperature (0 is
// greedy, the default is 1) and Sampling.Seed, are pointers: see [Ptr].
//
// # Errors
//
// Every error is an [*Error], with the library's own message, except that a context that is done gives its own error. Tell
// kinds apart with errors.Is(err, pagedllm.ErrCapacity). Nothing that is wrong with a request, an option or a model ends the
// process.
//
// # Contexts
//
// What waits takes a context and ends with its error as soon as it is done. If it is done beforehand, nothing is begun. A
// request whose context is done is aborted, and its memory is free from the next step on. A context's deadline is not made a
// Request.Deadline: who cancels wants no answer, who sets a Deadline wants the one that there is by then.
//
// # Goroutines and threads
//
// Everything may be used by any number of goroutines. A goroutine that waits is parked on the runtime's network poller: it
// occupies no thread, however many wait, but each stream and each queue takes two file descriptors. The library never calls
// into Go, so its hook that edits logits is not offered here. Only Open, Plan, Step, Stop and Close keep a thread for as long as
// they take.
//
// # Closing
//
// [Engine.Close] may be called at any time, from any goroutine, more than once. It waits for calls under way, and what waits
// or streams ends with [ErrClosed]. An engine, an arena, a queue or a sequence that is forgotten is closed some time after the
// garbage collector finds out.
//
// # Building
//
// The package needs cgo, Linux, the header pagedllm.h and the library. By default it links -lpagedllm, found where the
// compiler looks or where you say:
//
//	CGO_CFLAGS="-I$PREFIX/include" CGO_LDFLAGS="-L$PREFIX/lib -Wl,-rpath,$PREFIX/lib" go build
//
// Build tags choose another way:
//
//	go build -tags pagedllm_pkgconfig   # flags from pkg-config pagedllm (PKG_CONFIG_PATH=$PREFIX/lib/pkgconfig)
//	go build -tags pagedllm_static      # libpagedllm.a goes into the program; CGO_CFLAGS and CGO_LDFLAGS say where it is
package pagedllm
