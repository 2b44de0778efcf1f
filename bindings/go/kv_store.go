package pagedllm

// #cgo LDFLAGS: -ldl
// #include "connectors.h"
import "C"

import (
	"cmp"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"time"
	"unsafe"
)

// A KVStore keeps KV blocks outside of the pool of an engine: on a disk, or on another host. A
// prefix that one engine has computed is then a hit for another engine, and after a restart. If
// Open with Options.KVStore succeeds, the engine has the store and closes it. If Open fails, close
// the store. Each engine needs a store of its own; several stores may refer to the same data.
type KVStore struct{ store *hostStore }

// hostStore is a pllm_kv_store of a connector. The struct is in memory of C, because it points
// there.
type hostStore struct {
	mu      sync.Mutex
	c       *C.pllm_kv_store // nil after it has been closed, or taken by an engine
	isTaken bool
}

// FilesStore has the options of a store in a directory of a local disk. Only Directory is required.
type FilesStore struct {
	// Directory is created if it does not exist. An existing one must be empty or that of a store.
	// Any number of stores, also of other processes, may use it.
	Directory string
	// MaxBytes is the number of bytes that the files may occupy, at least 1 MiB. 0: 10 GiB.
	MaxBytes int64
	// IOUring true: if the system does not permit io_uring, the call returns ErrUnsupported. false:
	// threads. nil: io_uring if the system permits it, otherwise threads.
	IOUring *bool
	// Threads is the number of threads without io_uring, at most 64. 0: 4.
	Threads int
	// Library is the path of libpagedllm_files.so. "": the system's loader finds it.
	Library string
}

// ValkeyStore has the options of a store in a Valkey or Redis server.
type ValkeyStore struct {
	// Host is a name or an address. A path that begins with "/" is a Unix socket. "": 127.0.0.1.
	Host string
	// Port is the TCP port. 0: 6379.
	Port int
	// Username and Password are sent to the server. "": none.
	Username, Password string
	// Database is the number of the database.
	Database int
	// KeyPrefix is the beginning of the names of all keys, at most 256 bytes. "": "pagedllm:kv:".
	KeyPrefix string
	// TTL is the time, in whole seconds, after which an unused value expires. 0: never.
	TTL time.Duration
	// Timeout is the time without progress after which a connection is closed. 0: 2 s.
	Timeout time.Duration
	// Library is the path of libpagedllm_valkey.so. "": the system's loader finds it.
	Library string
}

// OpenFilesStore opens a store in a directory. It reads the directory, so it may wait for the disk.
func OpenFilesStore(options FilesStore) (*KVStore, error) {
	connector, err := loadConnector("files", options.Library)
	if err != nil {
		return nil, err
	}
	var args arguments
	defer args.Unpin()
	c := new(C.files_options)
	C.init_options(&connector, unsafe.Pointer(c), C.sizeof_files_options)
	c.directory, c.directory_len = args.text(options.Directory)
	args.setUint64(&c.max_bytes, "MaxBytes", options.MaxBytes)
	args.setUint32(&c.threads, "Threads", options.Threads)
	if options.IOUring != nil {
		c.io = 1 // PLLM_FILES_IO_THREADS
		if *options.IOUring {
			c.io = 2 // PLLM_FILES_IO_URING
		}
	}
	args.Pin(c)
	return openStore(&args, &connector, unsafe.Pointer(c))
}

// OpenValkeyStore opens a store in a server. It does not wait for the server: one that cannot be
// reached costs hits, and the store connects when it is back.
func OpenValkeyStore(options ValkeyStore) (*KVStore, error) {
	connector, err := loadConnector("valkey", options.Library)
	if err != nil {
		return nil, err
	}
	var args arguments
	defer args.Unpin()
	c := new(C.valkey_options)
	C.init_options(&connector, unsafe.Pointer(c), C.sizeof_valkey_options)
	args.setText(&c.host, &c.host_len, options.Host)
	args.setText(&c.username, &c.username_len, options.Username)
	args.setText(&c.password, &c.password_len, options.Password)
	args.setText(&c.key_prefix, &c.key_prefix_len, options.KeyPrefix)
	args.setUint32(&c.port, "Port", options.Port)
	args.setUint32(&c.database, "Database", options.Database)
	if options.TTL < 0 {
		args.refuse("TTL is %v; must not be negative", options.TTL)
	}
	seconds := int64(options.TTL / time.Second)
	if options.TTL%time.Second != 0 {
		seconds++
	}
	args.setUint64(&c.ttl_seconds, "TTL", seconds)
	args.setMilliseconds32(&c.timeout_ms, "Timeout", options.Timeout)
	args.Pin(c)
	return openStore(&args, &connector, unsafe.Pointer(c))
}

func loadConnector(name, library string) (c C.connector, err error) {
	var args arguments
	defer args.Unpin()
	file := "libpagedllm_" + name + ".so"
	path := cmp.Or(library, file+".1")
	if strings.ContainsRune(path, 0) {
		return c, &Error{Code: ErrInvalidArgument, Message: "Library has a NUL byte; pass a path of a file"}
	}
	cPath, _ := args.text(path + "\x00")
	init, _ := args.text("pllm_" + name + "_store_options_init\x00")
	open, _ := args.text("pllm_" + name + "_store_open\x00")
	var text [512]C.char
	if C.load_connector(cPath, init, open, &c, &text[0], C.uint64_t(len(text))) == 0 {
		remedy := "run `make connectors`, and pass the path of " + file + " as Library or install it"
		return c, &Error{Code: ErrIO, Message: fmt.Sprintf("%s; %s", C.GoString(&text[0]), remedy)}
	}
	return c, nil
}

func openStore(args *arguments, connector *C.connector, options unsafe.Pointer) (*KVStore, error) {
	if args.err != nil {
		return nil, args.err
	}
	c := C.new_store()
	if c == nil {
		return nil, &Error{Code: ErrOutOfMemory, Message: "no memory for a KV store"}
	}
	var text [512]C.char
	if code := C.open_store(connector, options, c, &text[0], C.uint64_t(len(text))); code != 0 {
		C.free(unsafe.Pointer(c))
		return nil, &Error{Code: Code(code), Message: C.GoString(&text[0])}
	}
	s := &KVStore{&hostStore{c: c}}
	whenUnreachable(s, s.store.close)
	return s, nil
}

// Close closes the store. It has no effect on an engine that has the store. It waits for an Open
// with the store. It may be called at any time, from any goroutine, more than once. It returns nil.
func (s *KVStore) Close() error {
	s.store.close()
	return nil
}

// use makes a call with the store, which belongs to the library if the call succeeds.
func (s *KVStore) use(call func(*C.pllm_kv_store) error) error {
	// The cleanup of an unreachable store must not close it during the call.
	defer runtime.KeepAlive(s)
	s.store.mu.Lock()
	defer s.store.mu.Unlock()
	switch {
	case s.store.isTaken:
		return &Error{Code: ErrInvalidArgument, Message: "the KV store belongs to another engine; open a store for each engine"}
	case s.store.c == nil:
		return &Error{Code: ErrClosed, Message: "the KV store is closed"}
	}
	err := call(s.store.c)
	if err == nil {
		// The library has copied the struct.
		s.store.isTaken = true
		s.store.free()
	}
	return err
}

func (s *hostStore) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.c != nil {
		C.close_store(s.c)
		s.free()
	}
}

func (s *hostStore) free() {
	C.free(unsafe.Pointer(s.c))
	s.c = nil
}
