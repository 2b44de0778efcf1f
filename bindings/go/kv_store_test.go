package pagedllm_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/libpagedllm/libpagedllm/bindings/go"
)

// Made by `make connectors`.
const connectors = "../../build/connectors/"

// stored returns a request with 31 full blocks and 4 tokens.
func stored() pagedllm.Request {
	request := pagedllm.Request{Sampling: pagedllm.Sampling{Temperature: pagedllm.Ptr(0.0), MaxTokens: 24, IgnoreEOS: true}}
	for i := range uint32(500) {
		request.PromptTokenIDs = append(request.PromptTokenIDs, 3+i*i%250)
	}
	return request
}

func filesStore(t *testing.T, directory string) *pagedllm.KVStore {
	t.Helper()
	return opened(t)(pagedllm.OpenFilesStore(pagedllm.FilesStore{Directory: directory, Library: connectors + "libpagedllm_files.so"}))
}

// opened returns a function that returns a store without an error, and closes it at the end.
func opened(t *testing.T) func(*pagedllm.KVStore, error) *pagedllm.KVStore {
	return func(store *pagedllm.KVStore, err error) *pagedllm.KVStore {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { store.Close() })
		return store
	}
}

// withStore sets a store. An engine writes its blocks while it is closed, and the tests must not
// depend on time.
func withStore(store *pagedllm.KVStore) func(*pagedllm.Options) {
	return func(o *pagedllm.Options) { o.KVStore, o.KVStoreTimeout = store, lastResort }
}

// answer returns the answer of an engine with a store, and its hits.
func answer(t *testing.T, store *pagedllm.KVStore, changes ...func(*pagedllm.Options)) (pagedllm.Completion, int) {
	t.Helper()
	engine := open(t, append([]func(*pagedllm.Options){withStore(store)}, changes...)...)
	defer engine.Close()
	completion := generate(t, engine, stored())
	return completion, statsOf(t, engine).KVStoreHits
}

// wantShared requires that a second engine has the blocks of the first, and the tokens of an engine
// without a store.
func wantShared(t *testing.T, openStore func() *pagedllm.KVStore, changes ...func(*pagedllm.Options)) {
	t.Helper()
	want := generate(t, open(t), stored())
	if want.CachedTokens != 0 || len(want.Tokens) != 24 {
		t.Fatalf("%d cached tokens, %d tokens", want.CachedTokens, len(want.Tokens))
	}
	for i, cached := range []int{0, 496} {
		got, hits := answer(t, openStore(), changes...)
		if !slices.Equal(got.Tokens, want.Tokens) {
			t.Errorf("engine %d has the tokens %v, not %v", i, got.Tokens, want.Tokens)
		}
		if got.CachedTokens != cached || hits != cached/16 {
			t.Errorf("engine %d has %d cached tokens and %d hits, not %d and %d", i, got.CachedTokens, hits, cached, cached/16)
		}
	}
}

func TestAnEngineFindsTheBlocksOfAnotherOne(t *testing.T) {
	directory := filepath.Join(t.TempDir(), "store")
	wantShared(t, func() *pagedllm.KVStore { return filesStore(t, directory) })
}

func TestAnEngineFindsBlocksWithAllOptions(t *testing.T) {
	files := pagedllm.FilesStore{Directory: filepath.Join(t.TempDir(), "store"), MaxBytes: 1 << 30, IOUring: pagedllm.Ptr(false),
		Threads: 2, Library: connectors + "libpagedllm_files.so"}
	secret := func(text string) func(*pagedllm.Options) {
		return func(o *pagedllm.Options) {
			o.KVStoreMaxBytes, o.KVStoreMaxOperations, o.KVStoreSecret = 64<<20, 8, []byte(text)
		}
	}
	openStore := func() *pagedllm.KVStore { return opened(t)(pagedllm.OpenFilesStore(files)) }
	wantShared(t, openStore, secret("a secret \x00 of 32 bytes"))
	if _, hits := answer(t, openStore(), secret("a secret \x00 of 33 bytes")); hits != 0 {
		t.Errorf("%d hits with another secret", hits)
	}
}

func TestAnEngineFindsBlocksInAServer(t *testing.T) {
	program, err := exec.LookPath("valkey-server")
	if err != nil {
		program, err = exec.LookPath("redis-server")
	}
	if err != nil {
		t.Fatal("neither valkey-server nor redis-server is installed")
	}
	folder, err := os.MkdirTemp("", "pagedllm-go") // the path of a socket is short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(folder) })
	socket := folder + "/socket"
	server := exec.Command(program, "--port", "0", "--unixsocket", socket, "--save", "", "--requirepass", "sesame", "--dir", folder,
		"--logfile", folder+"/log")
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		server.Process.Kill()
		server.Wait()
	})
	eventually(t, "the server has started", func() bool { return exists(socket) })
	valkey := pagedllm.ValkeyStore{Host: socket, Username: "default", Password: "sesame", Database: 3, KeyPrefix: "mine:", TTL: time.Hour,
		Timeout: lastResort, Library: connectors + "libpagedllm_valkey.so"}
	wantShared(t, func() *pagedllm.KVStore { return opened(t)(pagedllm.OpenValkeyStore(valkey)) })
	// Each option has an effect, so blocks with other options are not found.
	for name, change := range map[string]func(*pagedllm.ValkeyStore){
		"database": func(o *pagedllm.ValkeyStore) { o.Database = 4 },
		"prefix":   func(o *pagedllm.ValkeyStore) { o.KeyPrefix = "yours:" },
		"password": func(o *pagedllm.ValkeyStore) { o.Password = "wrong" },
		"username": func(o *pagedllm.ValkeyStore) { o.Username = "other" },
	} {
		other := valkey
		change(&other)
		if _, hits := answer(t, opened(t)(pagedllm.OpenValkeyStore(other))); hits != 0 {
			t.Errorf("%d hits with another %s", hits, name)
		}
	}
}

func TestWrongOptionsOfStoresAreErrors(t *testing.T) {
	folder := t.TempDir()
	if err := os.WriteFile(folder+"/other", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		options pagedllm.FilesStore
		code    pagedllm.Code
		words   string
	}{
		{pagedllm.FilesStore{Directory: folder}, pagedllm.ErrInvalidArgument, folder},
		{pagedllm.FilesStore{Directory: "/nowhere/store"}, pagedllm.ErrIO, "/nowhere/store"},
		{pagedllm.FilesStore{}, pagedllm.ErrInvalidArgument, "directory is empty"},
		{pagedllm.FilesStore{Directory: folder + "/store", MaxBytes: 5}, pagedllm.ErrInvalidArgument, "max_bytes is 5"},
		{pagedllm.FilesStore{Directory: folder + "/store", MaxBytes: -5}, pagedllm.ErrInvalidArgument, "MaxBytes is -5"},
		{pagedllm.FilesStore{Directory: folder + "/store", Threads: 65}, pagedllm.ErrInvalidArgument, "threads is 65"},
	} {
		c.options.Library = connectors + "libpagedllm_files.so"
		_, err := pagedllm.OpenFilesStore(c.options)
		wantMessage(t, err, c.code, c.words)
	}
	for _, c := range []struct {
		options pagedllm.ValkeyStore
		words   string
	}{
		{pagedllm.ValkeyStore{Port: 65536}, "port is 65536"},
		{pagedllm.ValkeyStore{Timeout: time.Hour + 1}, "timeout_ms is 3600001"},
		{pagedllm.ValkeyStore{TTL: 365*24*time.Hour + 1}, "ttl_seconds is 31536001"},
		{pagedllm.ValkeyStore{TTL: -1}, "TTL is -1ns"},
	} {
		c.options.Library = connectors + "libpagedllm_valkey.so"
		_, err := pagedllm.OpenValkeyStore(c.options)
		wantMessage(t, err, pagedllm.ErrInvalidArgument, c.words)
	}
	_, err := pagedllm.OpenFilesStore(pagedllm.FilesStore{Directory: folder, Library: "/nowhere/libpagedllm_files.so"})
	wantMessage(t, err, pagedllm.ErrIO, "make connectors")
	_, err = pagedllm.OpenValkeyStore(pagedllm.ValkeyStore{Library: connectors + "libpagedllm_files.so"})
	wantMessage(t, err, pagedllm.ErrIO, "pllm_valkey_store")
}

func TestAStoreBelongsToOneEngine(t *testing.T) {
	store := filesStore(t, t.TempDir()+"/store")
	options := small()
	options.ModelPath = "/nowhere"
	withStore(store)(&options)
	_, err := pagedllm.Open(background, options)
	wantErr(t, err, pagedllm.ErrIO)
	// The call has failed, so the store still belongs to the test.
	engine := open(t, withStore(store))
	store.Close()
	taken := "the KV store belongs to another engine; open a store for each engine"
	options = small()
	withStore(store)(&options)
	_, err = pagedllm.Open(background, options)
	wantMessage(t, err, pagedllm.ErrInvalidArgument, taken)
	// The engine has not lost its store: closing it stores the blocks.
	generate(t, engine, stored())
	engine.Close()
	_, err = pagedllm.Open(background, options)
	wantMessage(t, err, pagedllm.ErrInvalidArgument, taken)
}

func TestStoresAreClosedOnce(t *testing.T) {
	directory := t.TempDir() + "/store"
	// The first engine creates descriptors that stay.
	open(t, withStore(filesStore(t, directory))).Close()
	before := openDescriptors(t)
	for range 20 {
		store := filesStore(t, directory)
		store.Close()
		store.Close()
		options := small()
		withStore(store)(&options)
		_, err := pagedllm.Open(background, options)
		wantMessage(t, err, pagedllm.ErrClosed, "the KV store is closed")
		taken := filesStore(t, directory)
		engine := open(t, withStore(taken))
		taken.Close()
		engine.Close()
		taken.Close()
	}
	if after := openDescriptors(t); after != before {
		t.Errorf("%d descriptors, and %d before", after, before)
	}
}

func TestAnUnreachableStoreIsClosed(t *testing.T) {
	before := openDescriptors(t)
	directory := t.TempDir() + "/store"
	func() {
		_, err := pagedllm.OpenFilesStore(pagedllm.FilesStore{Directory: directory, Library: connectors + "libpagedllm_files.so"})
		if err != nil {
			t.Fatal(err)
		}
		if openDescriptors(t) <= before {
			t.Fatal("a store has no descriptors")
		}
	}()
	eventually(t, "the store is closed", func() bool {
		runtime.GC()
		return openDescriptors(t) <= before
	})
}

func TestGoroutinesDoNotGiveAStoreToTwoEngines(t *testing.T) {
	options := small()
	withStore(filesStore(t, t.TempDir()+"/store"))(&options)
	var (
		group sync.WaitGroup
		mu    sync.Mutex
		count int
	)
	for range 4 {
		group.Add(1)
		go func() {
			defer group.Done()
			engine, err := pagedllm.Open(background, options)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				wantErr(t, err, pagedllm.ErrInvalidArgument)
				return
			}
			count++
			engine.Close()
		}()
	}
	if group.Wait(); count != 1 {
		t.Errorf("%d engines have the store", count)
	}
}
