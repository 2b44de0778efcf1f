package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/libpagedllm/libpagedllm/bindings/go"
	"github.com/libpagedllm/libpagedllm/examples/server-go/internal/server"
)

// keysVariable is the environment variable with API keys, separated by spaces or newlines.
const keysVariable = "PAGEDLLM_API_KEYS"

// config has the values of the flags.
type config struct {
	models         []namedPath
	formats        map[string]string
	address        string
	maxConnections int
	kvBytes        int64
	engine         pagedllm.Options
	server         server.Options
	headerTimeout  time.Duration
	idleTimeout    time.Duration
	drain          time.Duration
	grace          time.Duration
	traceEndpoint  string
	kvEvents       kvEventsConfig
}

type namedPath struct{ name, path string }

// parseFlags prints what is wrong, or the flags for -h, and returns an error then.
func parseFlags(arguments []string) (*config, error) {
	c := &config{formats: make(map[string]string), kvBytes: 1 << 30}
	c.server.MaxBodyBytes, c.server.MaxBodiesBytes = 8<<20, 256<<20
	flags := flag.NewFlagSet("server-go", flag.ContinueOnError)
	flags.Func("model", "`[NAME=]PATH` of a model directory or GGUF file; repeat it for several "+
		"models", c.addModel)
	flags.Func("format", "`[NAME=]FORMAT` of reasoning and tool calls, see docs/tools.md "+
		"(default: that of the chat template)", c.addFormat)
	flags.StringVar(&c.address, "address", "127.0.0.1:8080", "`address` to listen on")
	keys := flags.String("api-keys", "", "`file` with one API key in each line (default: the keys "+
		"in $"+keysVariable+")")
	flags.Func("kv-bytes", "`size` of the KV pools of all models together, such as 4GiB (default "+
		"1GiB)", sizeFlag(&c.kvBytes))
	flags.StringVar(&c.traceEndpoint, "trace-endpoint", "",
		"`URL` of an OpenTelemetry collector for spans, such as http://localhost:4318/v1/traces "+
			"(default: none)")
	c.addEngineFlags(flags)
	c.addLimits(flags)
	c.addTimes(flags)
	c.kvEvents.addFlags(flags)
	if err := flags.Parse(arguments); err != nil {
		return nil, err
	}
	err := c.check(flags.Args())
	if err == nil {
		c.server.Keys, err = readKeys(*keys)
	}
	if err != nil {
		fmt.Fprintln(flags.Output(), "server-go:", err)
	}
	return c, err
}

func (c *config) addEngineFlags(flags *flag.FlagSet) {
	flags.StringVar(&c.engine.Device, "device", "cpu", "cpu or cuda:0")
	flags.Float64Var(&c.engine.MemoryFraction, "memory-fraction", 0,
		"CUDA: `fraction` of the free device memory for the KV pool, instead of -kv-bytes")
	flags.IntVar(&c.engine.Threads, "threads", 0,
		"threads of each model (default: the CPUs divided by the models)")
	flags.IntVar(&c.engine.MaxModelLen, "max-model-len", 0,
		"maximum length of a sequence in `tokens` (default: that of the model)")
	flags.IntVar(&c.engine.MaxSeqs, "max-seqs", 64,
		"maximum number of running sequences of each model")
	flags.IntVar(&c.engine.MaxBatchTokens, "max-batch-tokens", 512,
		"maximum number of `tokens` in one step")
	flags.IntVar(&c.engine.MaxWaitingRequests, "max-waiting", 2048,
		"maximum number of waiting `requests` of each model")
}

func (c *config) addLimits(flags *flag.FlagSet) {
	flags.IntVar(&c.maxConnections, "max-connections", 4096,
		"maximum number of open `connections`; further clients wait")
	flags.IntVar(&c.server.MaxRequests, "max-requests", 2048,
		"maximum number of `requests` in progress")
	flags.IntVar(&c.server.MaxResults, "max-results", 128,
		"maximum number of `sequences` of one request")
	flags.IntVar(&c.server.MaxLogprobs, "max-logprobs", 20,
		"maximum number of `alternatives` for each token")
	flags.Func("max-prompt-bytes", "maximum `size` of a text to tokenize (default: 64 for each "+
		"token of the maximum length)", sizeFlag(&c.engine.MaxPromptBytes))
	flags.Func("max-body", "maximum `size` of a request (default 8MiB)",
		sizeFlag(&c.server.MaxBodyBytes))
	flags.Func("max-bodies", "maximum `size` of all requests in progress together (default 256MiB)",
		sizeFlag(&c.server.MaxBodiesBytes))
}

func (c *config) addTimes(flags *flag.FlagSet) {
	flags.DurationVar(&c.server.MaxWait, "max-wait", 0,
		"longest acceptable forecast of the time to the first token (default: no limit)")
	flags.DurationVar(&c.server.MaxTime, "max-time", 10*time.Minute,
		"time after which a request ends with the tokens it has; 0: no limit")
	flags.DurationVar(&c.headerTimeout, "header-timeout", 10*time.Second,
		"time within which the headers of a request must arrive")
	flags.DurationVar(&c.server.ReadTimeout, "read-timeout", 30*time.Second,
		"time within which the body of a request must arrive")
	flags.DurationVar(&c.server.WriteTimeout, "write-timeout", 30*time.Second,
		"time within which a client must take each part of its answer")
	flags.DurationVar(&c.idleTimeout, "idle-timeout", 2*time.Minute,
		"time after which an idle connection is closed")
	flags.DurationVar(&c.server.KeepAlive, "keep-alive", 15*time.Second,
		"time after which a silent stream has a comment")
	flags.DurationVar(&c.drain, "drain", 5*time.Second,
		"time for which /health fails before the server accepts no more connections")
	flags.DurationVar(&c.grace, "grace", 30*time.Second,
		"time for the requests in progress when the server shuts down")
}

func (c *config) addModel(text string) error {
	name, path, named := strings.Cut(text, "=")
	if !named || strings.Contains(name, "/") { // a "=" within the path
		path = text
		name = strings.TrimSuffix(filepath.Base(filepath.Clean(path)), ".gguf")
	}
	if name == "" || path == "" {
		return errors.New("the name or the path is empty; give [NAME=]PATH")
	}
	for _, other := range c.models {
		if other.name == name {
			return fmt.Errorf("two models have the name %q; name them: NAME=PATH", name)
		}
	}
	c.models = append(c.models, namedPath{name, path})
	return nil
}

// addFormat sets the format of one model, or that of all models without their own.
func (c *config) addFormat(text string) error {
	name, format, named := strings.Cut(text, "=")
	if !named {
		name, format = "", text
	}
	c.formats[name] = format
	return nil
}

func (c *config) check(rest []string) error {
	switch {
	case len(rest) > 0:
		return fmt.Errorf("unexpected argument %q", rest[0])
	case len(c.models) == 0:
		return errors.New("no model; give -model PATH")
	case c.server.MaxLogprobs < 0:
		return errors.New("-max-logprobs must not be negative")
	case c.maxConnections < 1 || c.server.MaxRequests < 1 || c.server.MaxResults < 1:
		return errors.New("-max-connections, -max-requests and -max-results must be positive")
	case c.drain < 0 || c.grace < 0:
		return errors.New("-drain and -grace must not be negative")
	case c.server.ReadTimeout <= 0 || c.server.WriteTimeout <= 0 || c.headerTimeout <= 0 ||
		c.idleTimeout <= 0 || c.server.KeepAlive <= 0:
		return errors.New("timeouts must be positive")
	}
	if err := c.kvEvents.check(len(c.models)); err != nil {
		return err
	}
	for name := range c.formats {
		if name != "" && !slices.ContainsFunc(c.models,
			func(model namedPath) bool { return model.name == name }) {
			return fmt.Errorf("-format names the model %q, which no -model has", name)
		}
	}
	for _, model := range c.models {
		if _, ok := c.formats[model.name]; !ok {
			c.formats[model.name] = c.formats[""]
		}
	}
	if c.engine.Threads == 0 && c.engine.Device == "cpu" && len(c.models) > 1 {
		c.engine.Threads = max(1, runtime.NumCPU()/len(c.models))
	}
	return nil
}

func readKeys(path string) (server.Keys, error) {
	if path == "" {
		keys := strings.Fields(os.Getenv(keysVariable))
		return server.ReadKeys(strings.NewReader(strings.Join(keys, "\n")))
	}
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	keys, err := server.ReadKeys(file)
	if err == nil && len(keys) == 0 {
		err = fmt.Errorf("%s has no API key; without keys, every client could use the server", path)
	}
	return keys, err
}

// sizeFlag parses a number of bytes with the unit KiB, MiB, GiB or none.
func sizeFlag(size *int64) func(string) error {
	return func(text string) error {
		digits, shift := text, 0
		for unit, bits := range map[string]int{"KiB": 10, "MiB": 20, "GiB": 30} {
			if number, ok := strings.CutSuffix(text, unit); ok {
				digits, shift = number, bits
			}
		}
		number, err := strconv.ParseInt(digits, 10, 64)
		if err != nil || number < 1 || number > 1<<62>>shift {
			return errors.New("must be a number of bytes, such as 67108864, 64MiB or 4GiB")
		}
		*size = number << shift
		return nil
	}
}
